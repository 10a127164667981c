# eventlm on CPUs, as `make run` sets it up: the package, its default model at the first start, a server that records.
#
#   docker build -t eventlm .
#   docker run --init --stop-timeout 40 -p 127.0.0.1:8000:8000 -v eventlm:/data -e EVENTLM_API_KEY=... eventlm
#
# Inside, the server binds every address, so that it can be reached; `-p` decides who can reach the container.
# Publish it beyond this machine only with EVENTLM_API_KEY. `--stop-timeout` is more than --drain-seconds (30), so that
# running requests can end; `--init` passes signals on from the first moment.
#
# Other flags replace the last line: `docker run ... eventlm serve --host 0.0.0.0 --model Qwen/Qwen3-0.6B`.

ARG PYTHON=3.11
FROM python:${PYTHON}-slim

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

WORKDIR /src

# torch first: it is the largest and changes least. Where pip finds torch with CUDA, which brings gigabytes that a CPU has
# no use for, `--build-arg TORCH_INDEX=...` names an index of its CPU wheels; a CPU wheel counts as the newer of the two.
ARG TORCH_INDEX=
COPY constraints.txt ./
RUN pip install --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} --only-binary=:all: torch

# Then what else is needed: this layer lasts until pyproject.toml changes.
COPY pyproject.toml ./
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > requirements.txt \
    && pip install --constraint constraints.txt --requirement requirements.txt

# The package itself.
COPY setup.py README.md LICENSE ./
COPY eventlm ./eventlm
COPY kernels ./kernels
COPY policies ./policies
COPY replay ./replay
# The compiler makes the forward pass for CPUs, and is not needed after that.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ \
    && pip install --no-deps . \
    && apt-get purge --yes --auto-remove g++ && rm -rf /var/lib/apt/lists/*

# Models, traces and histories outlive the container.
RUN useradd --system --uid 10001 --create-home eventlm && install --directory --owner=eventlm /data
ENV EVENTLM_HOME=/data/cache HF_HOME=/data/huggingface XDG_STATE_HOME=/data/state
VOLUME /data
WORKDIR /data
USER eventlm

EXPOSE 8000
# The first start fetches and converts the model, which may take minutes.
HEALTHCHECK --start-period=10m --interval=30s --timeout=5s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]

ENTRYPOINT ["eventlm"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000", "--record", "/data/runs"]
