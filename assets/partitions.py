"""One partition for each window, keyed ``deployment/window``; the sensor adds them."""

import dagster as dg

windows = dg.DynamicPartitionsDefinition(name="windows")
