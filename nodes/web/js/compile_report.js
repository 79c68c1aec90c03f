// Compile Report as a table. Everything in it came from the server, so it is set as text, never as HTML.

export const TABLE_WIDTH = 680

const round = (value, digits) => (value == null ? '-' : value.toFixed(digits))

const COLUMNS = {
  region: ({ region }) => region,
  graphs: ({ graphs }) => graphs,
  'compile s': ({ compile_seconds }) => round(compile_seconds, 1),
  'tracing s': ({ tracing_seconds }) => round(tracing_seconds, 1),
  'cache hit/miss': (r) =>
    `${r.cache_hits + r.autograd_cache_hits}/${r.cache_misses + r.autograd_cache_misses}`,
  calls: ({ compiled_calls }) => compiled_calls,
  eager: ({ eager_calls }) => eager_calls,
  ms: ({ speed }) => round(speed.at(-1)?.compiled_ms, 2),
  'eager ms': ({ speed }) => round(speed.at(-1)?.eager_ms, 2),
  gain: ({ speed }) => (speed.length ? `${round(speed.at(-1).gain, 2)}x` : '-'),
  MiB: ({ memory_added_mib }) => memory_added_mib,
}

export function describeCompiling({ heading, regions = [], notes = [], text }) {
  if (!regions.some(({ graphs, compiled_calls, eager_calls }) => graphs || compiled_calls || eager_calls)) return [text]
  const breaks = regions.flatMap((r) => r.graph_breaks.map((where) => `${r.region}: graph break at ${where}`))
  return [heading, table(regions), ...breaks, ...compiledAgain(regions), ...notes]
}

/** Each cause once, with the regions that it met. */
function compiledAgain(regions) {
  const met = new Map()
  for (const { region, recompiles } of regions) {
    for (const cause of recompiles) met.set(cause, (met.get(cause) ?? new Set()).add(region))
  }
  return [...met].map(([cause, names]) => {
    const more = names.size > 3 ? ` and ${names.size - 3} more` : ''
    return `Compiled again: ${[...names].slice(0, 3).join(', ')}${more}: ${cause}`
  })
}

function table(regions) {
  const element = document.createElement('table')
  element.className = 'tessera-table'
  const head = element.createTHead().insertRow()
  for (const name of Object.keys(COLUMNS)) head.append(cell('th', name))
  const body = element.createTBody()
  for (const region of regions) {
    const row = body.insertRow()
    for (const value of Object.values(COLUMNS)) row.append(cell('td', value(region)))
  }
  return element
}

function cell(tag, value) {
  const element = document.createElement(tag)
  element.textContent = value
  return element
}
