# Weft without CUDA: built and tested in a clean system, then a small image that training programs run in. The installing is
# ./dev's own, so this file names no package of the build, only RDMA's of the image that programs run in.
#
#   docker build -f docker/cpu.Dockerfile -t weft-cpu .
#   docker run --rm weft-cpu                                       trains examples/digits on two processes
#   docker build -f docker/cpu.Dockerfile --target test .          builds, and runs every test
#
# BASE is Debian 12, from wherever that is had. Where apt and pip need settings (a mirror, a proxy), mount them for the build:
#   docker build --secret id=apt,src=apt.conf --secret id=pip,src=pip.conf …
# What was compiled and downloaded is kept by the builder (--mount=type=cache), beside the image: the next build
# compiles what has changed.
ARG BASE=debian:12

FROM ${BASE} AS build
# What ./dev itself needs to start.
RUN --mount=type=secret,id=apt,target=/etc/apt/apt.conf.d/99build,required=false \
    apt-get -q update && apt-get -qy install --no-install-recommends python3 ca-certificates && rm -rf /var/lib/apt/lists/*
WORKDIR /weft
# First the installing, which changes rarely.
COPY dev ./
COPY tools/dev tools/dev
COPY cmake/requirements cmake/requirements
RUN --mount=type=secret,id=apt,target=/etc/apt/apt.conf.d/99build,required=false \
    --mount=type=secret,id=pip,target=/etc/pip.conf,required=false \
    --mount=type=cache,target=/root/.cache/pip \
    ./dev setup --cuda off
COPY . .
ARG JOBS=
RUN --mount=type=cache,target=/root/.cache/ccache \
    ./dev build --preset cpu --cuda off ${JOBS:+--jobs ${JOBS}} digits weft-run weft-agent weft-info weft-debug weft-timeline

FROM build AS test
ARG JOBS=
RUN --mount=type=secret,id=apt,target=/etc/apt/apt.conf.d/99build,required=false \
    --mount=type=cache,target=/root/.cache/ccache \
    ./dev test --preset cpu --cuda off ${JOBS:+--jobs ${JOBS}}

# Programs with the libraries that they need, gathered by the build: no compiler, no headers, no Python.
FROM build AS gather
RUN ./dev pack --preset cpu --cuda off --output /opt/weft digits weft-run weft-agent weft-info weft-debug weft-timeline

FROM ${BASE} AS runtime
# Opened at run time: RDMA's library and the drivers that it opens by name. Without a card they do nothing.
RUN --mount=type=secret,id=apt,target=/etc/apt/apt.conf.d/99build,required=false \
    apt-get -q update && apt-get -qy install --no-install-recommends libibverbs1 ibverbs-providers && rm -rf /var/lib/apt/lists/*
COPY --from=gather /opt/weft /opt/weft
COPY --from=build /weft/examples/digits/data /weft/examples/digits/data
RUN useradd --create-home --uid 10001 weft
USER weft
WORKDIR /home/weft
ENV PATH=/opt/weft/bin:${PATH} LD_LIBRARY_PATH=/opt/weft/lib
CMD ["weft-run", "--nproc-per-node", "2", "digits", "--epochs", "1"]
