# Two stages: the first builds an environment, the second copies it and runs it as an unprivileged user, without a shell.
#   VARIANT      cpu, or gpu: torch with CUDA; the driver comes from the host (docker run --gpus all)
#   BASE         an image with python3 >= 3.11 and venv; deploy/digests.sh updates its digest
#   RUNTIME      base of the second stage, by default BASE: the same Python at the same path; needs neither shell nor pip
#   TORCH_INDEX  an index with CPU builds of torch, where uv cannot reach the usual one
#   EXTRAS       optional dependencies: `ray` for replicas of a cluster; the Kubernetes operator for Ray starts them by bash,
#                which the default image does not have
# A pip configuration is passed as the build secret `pip`, so that neither an index nor its password stays in a layer.
ARG BASE=python:3.12.15-slim-trixie@sha256:05cda9777409a9c3ffddd94a4c476b79f0769a0b4857f0c7ed9226b6800b0d6f
ARG RUNTIME=${BASE}
ARG VARIANT=cpu

FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
# Triton compiles the launcher of the attention kernel where it runs, so an image for GPUs has a C compiler.
ARG VARIANT
# hadolint ignore=DL3008
RUN install -d /opt/compiler/usr && if [ "${VARIANT}" = gpu ]; then \
        apt-get update && apt-get install -y --no-install-recommends --download-only gcc libc6-dev \
        && for package in /var/cache/apt/archives/*.deb; do dpkg -x "$package" /opt/compiler; done \
        && rm -rf /var/lib/apt/lists/*; fi
# The compiled step needs a compiler at build time only. Without one the image works, but is slower.
# hadolint ignore=DL3008
RUN command -v c++ >/dev/null \
    || { apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*; } \
    || echo "no C++ compiler: torch will compute"
RUN python3 -m venv /opt/polyhead && install -d /opt/models
# Torch is ten times as large as the rest and changes rarely, so it has its own layer.
ARG TORCH_INDEX=
COPY constraints.txt deploy/torch.sh ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf ./torch.sh "${VARIANT}" "${TORCH_INDEX}"
ARG EXTRAS=hub,otel
COPY . .
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/polyhead/bin/pip install -c constraints.txt ".[${EXTRAS}]"
RUN /opt/polyhead/bin/python deploy/slim.py "${VARIANT}"

FROM ${RUNTIME}
ARG VERSION=unknown
ARG REVISION=unknown
ARG VARIANT
LABEL org.opencontainers.image.title="polyhead" \
      org.opencontainers.image.description="Encoder classifiers and decoder generators behind one HTTP server (${VARIANT})" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# /models is the only writable folder: mount checkpoints there, or let the quick start fetch its models.
COPY --from=build --chown=10001:10001 /opt/models /models
COPY --from=build /opt/compiler/usr /usr
COPY --from=build /opt/polyhead /opt/polyhead
ENV PATH=/opt/polyhead/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/models \
    XDG_CACHE_HOME=/models/.cache \
    TRITON_CACHE_DIR=/tmp/triton \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    POLYHEAD_HOST=0.0.0.0
USER 10001:10001
WORKDIR /models
VOLUME ["/models"]
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import os; from polyhead.service.server.health_check import check_health; check_health(os.environ)"]
ENTRYPOINT ["polyhead"]
CMD ["serve"]
