"""People vote blindly between answers: who takes part, what is kept, the page, and what the votes say."""
