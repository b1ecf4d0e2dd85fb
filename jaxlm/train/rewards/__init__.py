"""Prompts, and what answers to them are worth.

    prompts  sources     which prompts a step asks: rows of a file, or questions that a task makes
    rewards              scores of answers: exact, function, format, perhaps a reward model's
    process  wire        the one child process in which tasks, functions and regular expressions run
    child  judges        its program; it imports no JAX

What a user or a library wrote may raise, hang or die. So it runs in a process that can be ended and replaced.
"""
