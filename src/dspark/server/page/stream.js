// The server's routes, as this page asks them.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

async function refused(response) {
  const body = await response.json().catch(() => null);
  return new ApiError(response.status, body?.error?.message ?? `the server answered ${response.status}`);
}

export async function info(key) {
  const response = await fetch("/info", { headers: headers(key) });
  if (!response.ok) throw await refused(response);
  return response.json();
}

// The messages of one streamed answer. Aborting `signal` hangs up, which frees the server's slot.
export async function* chat(body, key, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify({
      ...body,
      stream: true,
      stream_options: { include_usage: true },
      dspark: { rounds: true },
    }),
    signal,
  });
  if (!response.ok) throw await refused(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  while (true) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError(0, "the connection ended before the answer did");
    const messages = (held + value).split("\n\n");
    held = messages.pop();
    for (const message of messages) {
      if (!message.startsWith("data: ")) continue; // a comment that keeps the line alive
      const data = message.slice(6);
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new ApiError(0, found.error.message);
      yield found;
    }
  }
}
