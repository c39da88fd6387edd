# The kit's image: CUDA 13, Nsight Systems, a Ray with the three fixes, the kit. Needs BuildKit.
#
#   docker build -t gpu-idle-repro .                              the default, for a GPU machine
#   docker build --build-arg RAY_BUILD=source ...                 Ray built with the C++ patch (hours)
#   docker build --build-arg BASE_IMAGE=debian:bookworm --build-arg NSIGHT_SOURCE=debian --build-arg TORCH_SPEC=none ...
#                                                                 without NVIDIA's downloads, for the emulated device
# Closed networks: wheels in docker/wheels/ are preferred to the index; --secret id=ca,src=FILE brings a CA bundle.

# base: cudart and the driver contract (NVIDIA_* variables, compatibility check); torch's wheels carry every other CUDA
# library themselves, so runtime and devel would only repeat 2 to 8 GB.
ARG BASE_IMAGE=nvidia/cuda:13.0.2-base-ubuntu24.04
ARG NSIGHT_SOURCE=nvidia
ARG NSIGHT_VERSION=2026.1.3
ARG RAY_VERSION=2.58.0
ARG RAY_BUILD=wheel
ARG TORCH_SPEC=torch==2.14.0

# ---------------------------------------------------------------- base: what runs, without the kit
FROM ${BASE_IMAGE} AS base
ARG NSIGHT_SOURCE
ARG NSIGHT_VERSION
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV DEBIAN_FRONTEND=noninteractive
# hadolint ignore=DL3008  # the distribution's own point releases; the base image pins the distribution
RUN apt-get -qq update \
    && apt-get -qq install -y --no-install-recommends ca-certificates procps python3 tini >/dev/null \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/*
COPY docker/install-nsight /usr/local/sbin/
RUN --mount=type=secret,id=ca,target=/run/ca.crt \
    if [ -e /run/ca.crt ]; then export CURL_CA_BUNDLE=/run/ca.crt; fi; \
    install-nsight "${NSIGHT_SOURCE}" && rm -rf /var/lib/apt/lists/* /var/cache/apt/*

# ---------------------------------------------------------------- tools: what builds, left behind
FROM base AS tools
# hadolint ignore=DL3008
RUN apt-get -qq update \
    && apt-get -qq install -y --no-install-recommends g++ make python3-venv >/dev/null \
    && rm -rf /var/lib/apt/lists/*

# ---------------------------------------------------------------- flush: the preload library for a stock wheel
FROM tools AS flush
COPY patches/profiler_flush /src
RUN make -s -C /src OUT=/out

# ---------------------------------------------------------------- ray-wheel, ray-source: an environment with Ray in it
FROM tools AS ray-wheel
ARG RAY_VERSION
COPY requirements/kit.txt /src/
RUN --mount=type=secret,id=ca,target=/run/ca.crt \
    --mount=type=bind,source=docker/wheels,target=/wheels \
    --mount=type=cache,target=/root/.cache/pip \
    if [ -e /run/ca.crt ]; then export PIP_CERT=/run/ca.crt; fi; \
    grep -q "^ray.*==${RAY_VERSION} " /src/kit.txt || { echo "requirements/kit.txt pins another Ray" >&2; exit 3; }; \
    python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install -q --disable-pip-version-check --find-links /wheels --require-hashes -r /src/kit.txt

FROM ray-wheel AS ray-source
ARG RAY_VERSION
# hadolint ignore=DL3008
RUN apt-get -qq update \
    && apt-get -qq install -y --no-install-recommends curl git patch python3-dev unzip zip >/dev/null \
    && rm -rf /var/lib/apt/lists/*
COPY docker/build-ray /usr/local/sbin/
COPY patches /src/patches
# only what applies the patches: a change elsewhere in the kit must not build Ray again
COPY repro/__init__.py repro/errors.py /src/repro/
COPY repro/ray_patches /src/repro/ray_patches
RUN --mount=type=secret,id=ca,target=/run/ca.crt \
    --mount=type=cache,target=/root/.cache \
    if [ -e /run/ca.crt ]; then export PIP_CERT=/run/ca.crt CURL_CA_BUNDLE=/run/ca.crt GIT_SSL_CAINFO=/run/ca.crt; fi; \
    build-ray "${RAY_VERSION}" /src /opt/venv

# ---------------------------------------------------------------- environment: Ray, torch; no installer
# hadolint ignore=DL3006  # one of the two stages above
FROM ray-${RAY_BUILD} AS environment
ARG TORCH_SPEC
RUN --mount=type=secret,id=ca,target=/run/ca.crt \
    --mount=type=bind,source=docker/wheels,target=/wheels \
    --mount=type=cache,target=/root/.cache/pip \
    if [ -e /run/ca.crt ]; then export PIP_CERT=/run/ca.crt; fi; \
    if [ "${TORCH_SPEC}" != none ]; then \
        /opt/venv/bin/pip install -q --disable-pip-version-check --find-links /wheels "${TORCH_SPEC}"; \
    fi; \
    /opt/venv/bin/pip uninstall -q -y pip

# ---------------------------------------------------------------- kit: the image; no compiler, no cache
FROM base AS kit
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONPATH=/kit \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    USER=kit \
    MPLCONFIGDIR=/tmp/matplotlib \
    RAY_USAGE_STATS_ENABLED=0 \
    REPRO_IN_CONTAINER=1
RUN useradd --uid 10001 --no-create-home --home-dir /tmp kit \
    && install -d -o kit -g kit -m 1777 /results
COPY --from=environment /opt/venv /opt/venv
COPY --from=flush /out/libprofiler_flush.so /out/profiler_flush_warden /kit/build/profiler_flush/
COPY patches /kit/patches
COPY report_templates /kit/report_templates
COPY docker/write-build-json /usr/local/sbin/
COPY repro /kit/repro
ARG BASE_IMAGE
ARG NSIGHT_SOURCE
ARG RAY_BUILD
ARG KIT_REVISION=unknown
ENV REPRO_REVISION=${KIT_REVISION}
# The library is what the sources beside it were compiled to, whatever their times say: touch keeps it from being built
# again, for which there is no compiler here.
RUN touch /kit/build/profiler_flush/* \
    && python -m repro patches apply \
    && PYTHONDONTWRITEBYTECODE='' python -m compileall -q /kit/repro \
    && write-build-json >/kit/build.json
LABEL org.opencontainers.image.title="gpu-idle-repro" \
      org.opencontainers.image.description="Reproduction kit for the dataset Ray Data GPU Idle Profiles (B200)" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${KIT_REVISION}" \
      kit.base-image="${BASE_IMAGE}" kit.nsight-source="${NSIGHT_SOURCE}" kit.ray-build="${RAY_BUILD}"
USER 10001
# results/ is looked for in the working folder, so here it is /results
WORKDIR /
VOLUME /results
ENTRYPOINT ["/usr/bin/tini", "--", "python", "-m", "repro"]
CMD ["--help"]
