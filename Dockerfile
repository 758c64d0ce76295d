# The API and the webhook worker. No MLX: that runs natively, on Macs.

ARG PYTHON_IMAGE=python:3.11-slim
FROM ${PYTHON_IMAGE} AS build
RUN python -m venv /venv
WORKDIR /src
COPY . .
# What the extras api and webhook need, each file by its hash; then scorepool itself, built without downloads.
RUN /venv/bin/pip install --no-cache-dir --require-hashes --requirement deploy/requirements-server.txt \
 && /venv/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM ${PYTHON_IMAGE}
RUN useradd --system --uid 10001 --no-create-home scorepool
COPY --from=build /venv /venv
COPY deploy/worker_is_alive.py /app/
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /app
USER scorepool
CMD ["python", "-m", "scorepool.api"]
