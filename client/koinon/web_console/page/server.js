// Requests to the server. A result is {answer}, or {error} with a sentence.

export let onLoggedOut = () => {};
export function whenLoggedOut(callback) { onLoggedOut = callback; }

export async function ask(path, body) {
  try {
    const options = body === undefined ? {} : { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) };
    const reply = await fetch(path, options);
    const answer = await reply.json();
    if (reply.status === 401 && path !== "/api/login") onLoggedOut();
    return reply.ok ? { answer } : { error: answer.error, status: reply.status };
  } catch {
    return { error: "The console does not answer.", status: 0 };
  }
}

// Follows the events; each handler takes the data of its event. Reconnects by itself after a break,
// and continues after the last event received.
export function follow(handlers, onState) {
  let source = null;
  const open = () => {
    source?.close();
    source = new EventSource("/api/events");
    source.onopen = () => onState("on");
    source.onerror = async () => {
      onState("off");
      if (source.readyState !== EventSource.CLOSED) return;   // else it reconnects by itself
      const probe = await ask("/api/table/0");
      if (probe.status !== 401) setTimeout(open, 2000);
    };
    for (const [name, handle] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => { onState("on"); if (handle(JSON.parse(event.data)) === false) open(); });
    }
  };
  open();
  return open;
}
