"""The interpolation modes of both generations of transforms."""

import enum


class InterpolationMode(enum.Enum):
    """As torchvision's."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"
