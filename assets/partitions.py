"""One partition for each window, keyed ``deployment/window``; the sensor adds them."""

import dagster as dg

WINDOWS = "windows"
windows = dg.DynamicPartitionsDefinition(name=WINDOWS)
