"""People vote blindly between answers: the contestants, the store, the page, and the ratings by the votes."""
