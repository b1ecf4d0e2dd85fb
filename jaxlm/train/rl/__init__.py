"""Prompts, and the rewards of answers to them.

    prompts              the prompts of each step: rows of a file, or questions that a task makes
    rewards              scores of answers: exact, function, format, perhaps a reward model's
    process              child processes: one draws questions, one judges answers to them, one calls the user's function
    judges               the children's program; no JAX. Each answer to a task is judged in a fork without disk or network

The code of a user or a library may raise, hang or die, and code in a policy's answer may do anything. So both run in
processes that can be ended and replaced.
"""
