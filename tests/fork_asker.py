"""Runs a program in a fork of ``forks``: python -I -S fork_asker.py SOCKET REQUEST ...

REQUEST is JSON, with ``argv`` continued by what follows. Ends as the program ends.
"""

import json
import os
import signal
import socket
import sys

path, request, *arguments = sys.argv[1:]
asked = json.loads(request)
asked["argv"] += arguments
asked.update(cwd=os.getcwd(), environment=dict(os.environ))
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.connect(path)
    socket.send_fds(connection, [json.dumps(asked).encode()], [0, 1, 2])
    status = int(connection.recv(16) or 1)
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
