# Lockstep for CPUs: docker build -t lockstep .
FROM python:3.11-slim AS build
COPY . /source
RUN python -m venv /venv \
 && /venv/bin/pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu \
 && /venv/bin/pip install --no-cache-dir "/source[recipes]"

FROM python:3.11-slim
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH
RUN useradd --create-home lockstep
USER lockstep
WORKDIR /home/lockstep
CMD ["lockstep", "--help"]
