// Writes a request as a command, a program and a row of a file. Texts may hold anything: nothing of them may end a string
// early, and characters that do not show, or turn the direction of text, are escaped.
const HIDDEN = /[\u007f-\u00a0\u00ad\u061c\u115f\u1160\u180e\u2000-\u200f\u2028-\u202f\u205f-\u206f\u3000\u3164\ufeff\ufff9-\ufffb]/g;

// JSON on one line. Python reads its strings as the same strings.
export function json(value) {
  return JSON.stringify(value).replace(HIDDEN, (each) => `\\u${each.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

export function curl(request, origin, hasKeys) {
  const key = hasKeys ? ` \\\n  -H "Authorization: Bearer $SCOREPOOL_API_KEY"` : "";
  // A quoted here-document changes nothing of its lines, and JSON on one line cannot be its last.
  return `curl -sS ${origin}/v1/jobs -H 'Content-Type: application/json' -H 'Prefer: wait=60'${key} --data-binary @- <<'JSON'
${json(request)}
JSON
`;
}

function fields(values) {
  return Object.entries(values).map(([name, value]) => `${name}=${json(value)}`).join(", ");
}

function arguments_of({ items, messages, type, ...others }) {
  if (items) return `Score(${fields(others)}, items=[${items.map((item) => `ScoreItem(${fields(item)})`).join(", ")}])`;
  if (messages) return `Generate(${fields(others)}, messages=[${messages.map((each) => `Message(${fields(each)})`).join(", ")}])`;
  return `Generate(${fields(others)})`;
}

export function python(request, origin, hasKeys) {
  const names = request.items ? "Score, ScoreItem" : request.messages ? "Generate, Message" : "Generate";
  const key = hasKeys ? "  # the key is read from SCOREPOOL_API_KEY" : "";
  return `from scorepool import Client, ${names}

request = ${arguments_of(request)}
with Client(${json(origin)}) as client:${key}
    [sequence] = client.submit(request).result().sequences
print(sequence.text)
print(sequence.logprobs)
`;
}

export function jsonl({ items, messages, prompt }) {
  return `${json(items ? items[0] : { prompt: messages ?? prompt })}\n`;
}

export function command({ type, model, temperature, max_tokens: maxTokens, seed }, origin) {
  const options = { model, temperature, "max-tokens": maxTokens, seed, url: origin };
  const given = Object.entries(options).filter(([, value]) => value !== undefined).map((each) => `--${each.join(" ")}`);
  return `scorepool ${type} rows.jsonl -o out.jsonl --tokens ${given.join(" ")}`;
}
