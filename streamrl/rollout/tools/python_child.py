"""Runs ``code.py`` of its folder under limits: ``python -I -S python_child.py CPU_S MEMORY_BYTES FILE_BYTES``. Imports the standard library alone.

The limits are hard ones, so the code can't raise them. An error is one line, with the line of the code: no stack trace, no path of the machine.
"""

import resource
import sys

SAID = 120  # exit status of code that ended with an error which it printed


def main() -> int:
    cpu_s, memory_bytes, file_bytes = map(int, sys.argv[1:4])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("code.py", encoding="utf-8") as file:
        source = file.read()
    sys.argv = ["code.py"]
    try:
        exec(compile(source, "<code>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        return said(error.code)
    except BaseException as error:
        message = str(error.msg if isinstance(error, SyntaxError) else error)
        return said(f"{type(error).__name__}{': ' if message else ''}{message} (line {line_of(error)})")
    return 0


def said(code: object) -> int:
    """A number is the exit status, text is printed, like the interpreter does."""
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return SAID


def line_of(error: BaseException) -> int | None:
    """The innermost line of the code that led to the error."""
    if isinstance(error, SyntaxError) and error.filename == "<code>":
        return error.lineno
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<code>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


if __name__ == "__main__":
    sys.exit(main())
