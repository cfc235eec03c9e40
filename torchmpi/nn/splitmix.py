"""Constants of the splitmix64 generator, as signed 64-bit numbers: its finalizer scrambles words for checksums."""

STEP = 0x9E3779B97F4A7C15 - (1 << 64)
FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND = 0x94D049BB133111EB - (1 << 64)
