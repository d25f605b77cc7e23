// Server-sent events over fetch: EventSource cannot send a key.

/** The data of every event of a response, parsed. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

/** What the server says went wrong. */
export async function problem(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

/** The key that goes with every request, kept as long as the tab. */
export const key = {
  get: () => sessionStorage.getItem("dsde-key"),
  set: (value) => sessionStorage.setItem("dsde-key", value),
  headers: () => (key.get() ? { Authorization: `Bearer ${key.get()}` } : {}),
};

/** Frames of the dashboard, reconnecting until told to stop. */
export class Feed {
  constructor({ onFrame, onState, askKey }) {
    Object.assign(this, { onFrame, onState, askKey, controller: null });
  }

  start() {
    this.stop();
    this.controller = new AbortController();
    this.#run(this.controller.signal);
  }

  stop() {
    this.controller?.abort();
  }

  async #run(signal) {
    for (let wait = 500; !signal.aborted; wait = Math.min(2 * wait, 8000)) {
      try {
        const response = await fetch("dashboard/events", { headers: key.headers(), cache: "no-store", signal });
        if (response.status === 401) {
          this.onState("lost", "Waiting for a key");
          await this.askKey(key.get() ? await problem(response) : "");
          continue;
        }
        if (response.status === 403) return this.onState("lost", await problem(response));
        if (!response.ok) throw new Error(await problem(response));
        this.onState("live", "Live");
        for await (const frame of events(response)) {
          if (signal.aborted) return;
          wait = 500;
          this.onFrame(frame);
        }
      } catch (error) {
        if (signal.aborted) return;
      }
      this.onState("lost", "Connection lost, trying again");
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }
}
