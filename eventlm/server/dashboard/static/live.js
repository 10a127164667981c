// What the server tells: frames as a stream, the oldest requests by asking again, and reports.

import { useEffect, useState } from "preact/hooks";

/** How many frames are kept, one a second. */
export const MOST_FRAMES = 600;
const POLL_MS = 2000;
const PAUSE_MS = 2000;
const NUM_LISTED = 20;

/** An error reply of the server; status 0: within a stream. */
export class LookError extends Error {
  constructor(status, error) {
    super(error?.message || `The server answered with the status ${status}.`);
    this.status = status;
  }
}

/** Frames, the oldest first, and what is wrong at the moment. onRefused(message): the key is not accepted. */
export function useFrames(apiKey, onRefused) {
  const [frames, setFrames] = useState([]);
  const [trouble, setTrouble] = useState("");
  useEffect(() => {
    const controller = new AbortController();
    const { signal } = controller;
    async function follow() {
      while (!signal.aborted) {
        try {
          for await (const frame of streamFrames(apiKey, signal)) {
            setTrouble("");
            setFrames((known) => joined(known, frame));
          }
          if (!signal.aborted) setTrouble("The stream has ended; trying again.");
        } catch (error) {
          if (signal.aborted) return;
          if (error.status === 401 || error.status === 403) return onRefused(error.message);
          setTrouble(error instanceof LookError ? error.message : "The server cannot be reached; trying again.");
        }
        await pause(PAUSE_MS, signal);
      }
    }
    follow();
    return () => controller.abort();
  }, [apiKey]);
  return { frames, trouble };
}

/** The frames with one more; only that one, if the server was started anew. */
function joined(frames, frame) {
  const last = frames.at(-1);
  if (last && frame.frame.end_ns <= last.frame.end_ns) return [frame];
  return [...frames.slice(1 - MOST_FRAMES), frame];
}

/** The oldest requests, as of the last two seconds while the page is seen. */
export function useOldest(apiKey, onRefused) {
  const [state, setState] = useState({ oldest: null, oldestTrouble: "" });
  useEffect(() => {
    const controller = new AbortController();
    const { signal } = controller;
    async function poll() {
      while (!signal.aborted) {
        if (document.visibilityState === "visible") {
          try {
            const response = await request(`admin/look/requests?limit=${NUM_LISTED}`, apiKey, signal);
            const oldest = await response.json();
            setState({ oldest, oldestTrouble: "" });
          } catch (error) {
            if (signal.aborted) return;
            if (error.status === 401 || error.status === 403) return onRefused(error.message);
            // A server that cannot be reached is told of by the frames.
            if (error instanceof LookError) setState(({ oldest }) => ({ oldest, oldestTrouble: error.message }));
          }
        }
        await pause(POLL_MS, signal);
      }
    }
    poll();
    return () => controller.abort();
  }, [apiKey]);
  return state;
}

/** A report of the last minutes, as a Blob. */
export async function readReport(apiKey, minutes) {
  const response = await request(`admin/look/report?minutes=${minutes}`, apiKey);
  return response.blob();
}

async function* streamFrames(apiKey, signal) {
  const response = await request("admin/look/live", apiKey, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const [last] = event.split("\n").slice(-1);
      const told = JSON.parse(last.slice("data: ".length));
      if (told.error) throw new LookError(0, told.error);
      yield told;
    }
  }
}

async function request(path, apiKey, signal) {
  // Each character of a header stands for one byte; a key is sent as UTF-8.
  const bytes = new TextEncoder().encode(apiKey);
  const response = await fetch(new URL(path, document.baseURI), {
    headers: { Authorization: `Bearer ${String.fromCharCode(...bytes)}` },
    cache: "no-store",
    signal,
  });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new LookError(response.status, body?.error);
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, ms);
    signal.addEventListener("abort", end);
  });
}
