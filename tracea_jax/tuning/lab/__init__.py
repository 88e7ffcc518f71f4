"""Where candidates are compiled, run and lost: this process or a disposable one."""
