"""Error handlers that no seed can reach, and why."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache

from tests.world.swarm.handlers import all_handlers

#: Patterns of handler names, by reason.
REASONS: dict[str, tuple[str, ...]] = {
    "clients of a world ask for completions, chats and streams alone": (
        "eventlm/engine/explanations.py *",
        "eventlm/engine/object_store/*",
        "eventlm/engine/reports.py *",
        "eventlm/frontend/remote_engine.py RemoteEngine._call_for_long *",
        "eventlm/gateway/client.py HttpBackend._embedding *",
        "eventlm/server/anthropic/*",
        "eventlm/server/batches/*",
        "eventlm/server/context.py ServerContext._read_to_the_end except Exception",
        "eventlm/server/dashboard/*",
        "eventlm/server/endpoints/request_info.py *",
        "eventlm/server/llamacpp/*",
        "eventlm/server/ollama/*",
        "eventlm/server/openai/logprobs.py *",
        "eventlm/server/responses/*",
    ),
    "clients of a world send what they should": (
        "eventlm/engine/request_check.py *",
        "eventlm/server/context.py ServerContext.forwards_body *",
        "eventlm/server/context.py read_body *",
        "eventlm/server/context.py read_query *",
        "eventlm/server/context.py ServerContext.time_for_a_body *",
        "eventlm/server/cors.py *",
        "eventlm/server/endpoints/resumption.py _position *",
        "eventlm/server/http/content_encoding.py *",
        "eventlm/server/middleware.py _answered except web.HTTPException",
        "eventlm/server/translation.py *",
    ),
    "operators of a world make no such mistakes": (
        "eventlm/engine/plugins/*",
        "eventlm/engine/predictor/*",
        "eventlm/server/auth/api_keys.py _entry *",
        "eventlm/server/endpoints/admin.py *",
        "eventlm/server/endpoints/backends.py *",
        "eventlm/server/http_server.py *",
    ),
    "clients of a world resume streams alone, and nothing they ask for is larger than `--resume-memory`": (
        "eventlm/server/answer.py _answer_first *",
        "eventlm/server/endpoints/resumption.py _resume except UnknownReplyError 2",
    ),
    "there is no TLS in a world": ("eventlm/gateway/client.py _trusting *", "eventlm/server/http/tls.py *"),
    "no run of a world names several models": ("eventlm/server/model_rules.py *",),
    "backends of a world tell what they are without mistakes": (
        "eventlm/gateway/client.py HttpBackend._no_answer *",
        "eventlm/gateway/discovery.py _decode *",
    ),
    "the simulated network accepts each connection that waits": (
        "eventlm/server/http/listener.py Listener._accept except ConnectionError",
        "eventlm/server/http/listener.py Listener._accept except OSError",
    ),
    "a rank's process is spawned before, and its failure is handled there": (
        "eventlm/engine/replicas/worker_process.py WorkerProcess.start *",
    ),
    "the folder of runs is made before the first fault, and nobody removes it": (
        "eventlm/bus/log_writer.py LogWriter.check_folder *",
    ),
    "only its server writes to the folder of a run": (
        "eventlm/bus/segment_file.py SegmentFile.close_as except FileExistsError",
    ),
    "the server carries a submission out even if its client leaves meanwhile": (
        "eventlm/engine/group_admission.py Admission.wait except asyncio.CancelledError",
    ),
    "runs of a world record no tokens": ("eventlm/bus/token_log*",),
    "commands that read logs, not servers, come there": (
        "eventlm/bus/log_reader.py *",
        "eventlm/bus/run_list.py *",
        "eventlm/bus/segment_reader.py *",
        "eventlm/bus/trace_repair.py *",
    ),
    "it guards against defects of the server, which a seed must not find": (
        "eventlm/bus/bus.py Bus.publish except Exception",
        "eventlm/bus/log_writer.py LogWriter._check_header except ValueError",
        "eventlm/bus/subscription.py Subscription._next_past except Exception",
        "eventlm/engine/backends/controller.py BackendController._forward except Exception",
        "eventlm/engine/backends/controller.py BackendController._look_after except Exception",
        "eventlm/engine/engine_core.py EngineCore._deliver.leave except Exception",
        "eventlm/engine/engine_core.py EngineCore._deliver_output except Exception",
        "eventlm/engine/group_admission.py Admission.decide except Exception",
        "eventlm/engine/inference_engine.py InferenceEngine._guarded except Exception",
        "eventlm/engine/inference_engine.py InferenceEngine._tell_state except Exception",
        "eventlm/engine/replicas/controller.py ReplicaController._supervise except Exception",
        "eventlm/engine/replicas/controller.py ReplicaController._supervise except Exception 2",
        "eventlm/engine/inference_engine.py InferenceEngine._guarded except EventLMError",
        "eventlm/engine/replicas/controller.py ReplicaController._take except ResultMismatchError",
        "eventlm/frontend/front_end.py FrontEnd._give_up except Exception",
        "eventlm/frontend/front_end.py FrontEnd._supervise except Exception",
        "eventlm/frontend/front_ends.py FrontEndController._send_state except Exception",
        "eventlm/frontend/link.py FrontEndLink._answer except Exception",
        "eventlm/server/answer.py send_events except Exception",
        "eventlm/server/middleware.py _answered except Exception",
    ),
}


@cache
def unreached() -> frozenset[str]:
    """The names of all handlers that match."""
    patterns = [pattern for each in REASONS.values() for pattern in each]
    return frozenset(name for name in all_handlers() if any(fnmatchcase(name, pattern) for pattern in patterns))
