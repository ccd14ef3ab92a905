// Questions to the server, and the stream of what has changed.

const SILENCE_MS = 25_000;
const AGAIN_MS = 1_500;

export async function ask(path, query = []) {
  const text = new URLSearchParams(query).toString();
  const answer = await fetch(text ? `${path}?${text}` : path, { credentials: "same-origin" });
  const type = answer.headers.get("content-type") ?? "";
  const value = type.startsWith("application/json") ? await answer.json() : { error: await answer.text() };
  if (!answer.ok) throw Object.assign(new Error(value.error ?? answer.statusText), { status: answer.status });
  return value;
}

/** Follows the server's changes; opens the stream again whenever it has ended. */
export class Changes {
  constructor(onChange, onState) {
    this.onChange = onChange;
    this.onState = onState;
    this.boot = "";
    this.open();
  }

  open() {
    this.source?.close();
    clearTimeout(this.timer);
    this.source = new EventSource("/api/changes");
    this.source.onmessage = (event) => this.take(JSON.parse(event.data));
    this.source.onerror = () => this.fail();
    this.expect();
  }

  expect() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.fail(), SILENCE_MS);
  }

  take(change) {
    this.expect();
    this.onState(true);
    const isOther = this.boot !== "" && this.boot !== change.boot;
    this.boot = change.boot;
    this.onChange({ list: change.list || isOther, runs: change.runs, all: isOther });
  }

  fail() {
    this.onState(false);
    this.source.close();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.open(), AGAIN_MS);
  }
}
