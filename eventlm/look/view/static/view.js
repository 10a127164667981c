// The page of `eventlm view`: the report of a run that may go on, and its debugger.

import { h } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { ask } from "./client.js";
import { Debugger, useSession } from "./debugger.js";
import { linkTo } from "./place.js";
import { ReportPage } from "./report_page.js";
import { Notice, start } from "./shell.js";

const SECOND = 1e9;
const REFRESH_MS = 3000;

function View() {
  const [report, setReport] = useState(null);
  const [failure, setFailure] = useState("");
  const session = useSession();

  useEffect(() => {
    let isOver = false;
    async function follow() {
      try {
        while (!isOver) {
          const data = await ask("/api/report");
          setReport(data);
          setFailure("");
          // A page of a busy run need not change more often.
          await new Promise((done) => setTimeout(done, data.isEnded ? 0 : REFRESH_MS));
          let news = data;
          while (!isOver && !news.isEnded && news.nextEvent <= data.nextEvent) {
            news = await ask(`/api/news?after=${data.nextEvent}`);
          }
          if (news.isEnded && news.nextEvent <= data.nextEvent) return;
        }
      } catch (error) {
        setFailure(error.message);
      }
    }
    follow();
    return () => (isOver = true);
  }, []);

  if (failure && report === null) return h(Notice, { kind: "error" }, failure);
  if (report === null) return h(Notice, {}, "Reading the run …");
  const debug = {
    name: "debugger",
    title: "Debugger",
    draw: () => h(Debugger, { session }),
  };
  return h(ReportPage, {
    data: report,
    moreTabs: [debug],
    moreNotices: failure && h(Notice, { kind: "error" }, failure),
    onDebug: async (commands) => {
      location.hash = linkTo("debugger");
      for (const command of commands) await session.run(command);
    },
    actions: h(PlayButton, { report, session }),
  });
}

/** Plays the run at the speed that was asked for: the debugger's position goes on with time. */
function PlayButton({ report, session }) {
  const { speed } = report;
  const [isPlaying, setPlaying] = useState(false);
  const begun = useRef(null);
  const run = useRef(session.run);
  // One move at a time.
  run.current = (command) => !session.isBusy && session.run(command);
  // The run may have grown since the timer was set.
  const latest = useRef(report);
  latest.current = report;
  useEffect(() => {
    if (speed > 0) setPlaying(true);
  }, [speed]);
  useEffect(() => {
    if (!isPlaying) return undefined;
    begun.current = { at: performance.now(), ts: Math.max(session.ts, latest.current.firstNs) };
    const timer = setInterval(() => {
      const { at, ts } = begun.current;
      const now = ts + ((performance.now() - at) / 1000) * (speed || 1) * SECOND;
      const { lastNs, isEnded } = latest.current;
      if (now < lastNs) {
        run.current(`goto ${(now / SECOND).toFixed(9)}s`);
      } else if (isEnded) {
        setPlaying(false);
        run.current("goto end");
      } else {
        // It plays faster than the run goes on: it waits there.
        begun.current = { at: performance.now(), ts: lastNs };
      }
    }, 1000);
    return () => clearInterval(timer);
  }, [isPlaying]);
  return h(
    "button",
    { type: "button", class: "quiet", "aria-pressed": String(isPlaying), onClick: () => setPlaying(!isPlaying) },
    isPlaying ? "Pause" : "Play",
  );
}

start(() => h(View));
