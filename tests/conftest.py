"""For all tests: property tests without a clock, so that a busy machine fails none of them."""

from hypothesis import settings

settings.register_profile("naiad", deadline=None)
settings.load_profile("naiad")
