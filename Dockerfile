# Two stages on one base: the first builds an environment, the second copies it and runs it as nobody in particular.
#   BASE      an image with python3 >= 3.11 and venv
#   TORCH     which torch: a version, or the address of a wheel; constraints.txt pins plain `torch`
#   PIP_ARGS  more arguments for pip, such as the index that has CPU builds of torch
#   EXTRAS    which optional parts go in
# A pip configuration is passed as the build secret `pip`, so that neither an index nor its password stays in a layer.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
ARG TORCH=torch
ARG PIP_ARGS=
ARG EXTRAS=hub
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /source
# The compiled step wants a compiler here and none later.  Without one the image is complete, and slower.
RUN command -v c++ >/dev/null \
    || { apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*; } \
    || echo "no C++ compiler: torch will compute"
RUN python3 -m venv /opt/polyhead
# Torch is ten times the rest and changes least, so it has a layer of its own.
COPY constraints.txt ./
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/polyhead/bin/pip install ${PIP_ARGS} -c constraints.txt "${TORCH}"
COPY . .
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/polyhead/bin/pip install ${PIP_ARGS} -c constraints.txt ".[${EXTRAS}]"
RUN /opt/polyhead/bin/python deploy/slim.py

FROM ${BASE}
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="polyhead" \
      org.opencontainers.image.description="Encoder classifiers and decoder generators behind one HTTP server" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# /models is all that is ever written to: mount checkpoints there, or let the quick start fetch its own.
RUN install -d -o 10001 -g 10001 /models
COPY --from=build /opt/polyhead /opt/polyhead
ENV PATH=/opt/polyhead/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/models \
    XDG_CACHE_HOME=/models/.cache \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    POLYHEAD_HOST=0.0.0.0
USER 10001:10001
WORKDIR /models
VOLUME ["/models"]
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ.get('POLYHEAD_PORT', '8000') + '/readyz', timeout=2)"]
ENTRYPOINT ["polyhead"]
CMD ["serve"]
