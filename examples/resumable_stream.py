"""Lose the connection in the middle of a stream, and go on where it broke.

Start `eventlm serve --resume-seconds 60`, then `python resumable_stream.py [URL]`.
"""

import json
import sys
from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.request import Request, urlopen

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
BODY = {"prompt": "Count from one to ten:", "max_tokens": 40, "seed": 4, "ignore_eos": True, "stream": True}


def events(request: Request) -> Iterator[tuple[str, dict]]:
    """(event id, chunk) of each event of a stream."""
    event_id = ""
    with urlopen(request) as response:
        for line in response:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if name == "id":
                event_id = value
            elif name == "data" and value != "[DONE]":
                yield event_id, json.loads(value)


with urlopen(f"{URL}/v1/models") as response:
    model = json.load(response)["data"][0]["id"]
body = json.dumps({"model": model, **BODY}).encode()
post = Request(f"{URL}/v1/completions", body, {"Content-Type": "application/json"})

text = ""
stream = events(post)
while len(text) <= 20:
    event_id, chunk = next(stream)
    text += chunk["choices"][0]["text"]
stream.close()  # the connection is lost
print(f"lost the connection after {text!r}")

resumed = Request(f"{URL}/v1/stream/{chunk['id']}", headers={"Last-Event-ID": event_id})
try:
    for _, chunk in events(resumed):
        text += chunk["choices"][0]["text"]
except HTTPError as error:
    sys.exit(f"{json.load(error)['error']['message']} Start the server with --resume-seconds 60.")
print(f"the whole text: {text!r}")
