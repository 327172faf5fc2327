"""A generation that is halted."""

import asyncio


def halted_at(engine, tokens) -> asyncio.Event:
    """Let the engine sample `tokens` tokens, then decode no more before the next command.

    The event is set when it is there: commands that follow arrive in mid-generation."""
    halted, loop, step, commands = (
        asyncio.Event(),
        asyncio.get_running_loop(),
        engine._decoder.step,
        engine._commands,
    )

    def step_and_halt():
        finished = step()
        if engine.tokens_generated >= tokens and not halted.is_set():
            engine._decoder.step = step
            loop.call_soon_threadsafe(halted.set)
            command = commands.get(timeout=20)
            commands.put(None) if command is None else command()
        return finished

    engine._decoder.step = step_and_halt
    return halted
