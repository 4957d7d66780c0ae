# syntax=docker/dockerfile:1.7
# SGLang on CPUs, for values-dev.yaml: as `make setup` makes it, both environments in one image.
#   docker build -f deployments/images/server/cpu.Dockerfile -t tide/server:0.1.0-cpu .
ARG PYTHON=docker.io/library/python:3.11-slim-bookworm@sha256:528257d48c1da0dcecc2e725d1ae34498d60c965f1241e39cd6a85a8859bdf84

FROM ${PYTHON} AS build
ARG UV_VERSION=0.13.9
ARG TORCH_VERSION=2.13.0
ENV UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1
RUN pip install --no-cache-dir uv==${UV_VERSION}
WORKDIR /src
COPY requirements requirements
RUN --mount=type=cache,target=/root/.cache/uv uv venv --python 3.11 /opt/sglang \
    && UV_TORCH_BACKEND=cpu uv pip install --python /opt/sglang -c requirements/serving.txt torch==${TORCH_VERSION} \
    && uv pip install --python /opt/sglang --no-deps -r requirements/serving.txt
RUN --mount=type=cache,target=/root/.cache/uv uv venv --python 3.11 /opt/tide \
    && uv pip install --python /opt/tide -c requirements/dev.txt -r requirements/images/server.in
COPY . .
RUN --mount=type=cache,target=/root/.cache/uv uv pip install --python /opt/sglang --no-deps ./patches/torchvision . \
    && uv pip install --python /opt/tide --no-deps . \
    && cp -r drafts /opt/tide/lib/python3.11/site-packages/drafts
RUN /opt/sglang/bin/python -m tide_platform.engine.selfcheck --adapter && /opt/tide/bin/tide serve --help

FROM ${PYTHON}
RUN groupadd --gid 10001 tide && useradd --uid 10001 --gid tide --no-create-home --home-dir /tmp --shell /usr/sbin/nologin tide
COPY --from=build /opt/sglang /opt/sglang
COPY --from=build /opt/tide /opt/tide
ENV PATH=/opt/tide/bin:$PATH TIDE_SERVING__PYTHON=/opt/sglang/bin/python PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
CMD ["tide", "serve"]
