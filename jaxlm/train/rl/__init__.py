"""Prompts, and what answers to them are worth.

    prompts              which prompts a step asks: rows of a file, or questions that a task makes
    rewards              scores of answers: exact, function, format, perhaps a reward model's
    process              child processes: one draws questions, one judges answers to them, one calls the user's function
    judges               their program; it imports no JAX. Each answer to a task is judged in a fork that can reach nothing

What a user or a library wrote may raise, hang or die. So it runs in processes that can be ended and replaced. What a policy
wrote may do anything.
"""
