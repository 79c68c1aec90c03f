// The curves of runs: one as a sparkline, several in one chart. Names came from files, so they are set as text, never as
// HTML.
import { button, curveIn, drawing, part } from '../common/elements.js'
import { between, lineOf, placing } from '../run/curve.js'
import { t } from '../common/words.js'
import { WORDS } from './sentences.js'

const [WIDTH, HEIGHT] = [1000, 100] // of a drawing, in units that are stretched to its place
const MEAN = 3 // column of a point
export const COLOURS = ['#2f74e6', '#d97706', '#059669', '#db2777', '#7c3aed', '#0891b2', '#65a30d', '#dc2626']

/** The least and the greatest loss to show. */
const bounds = (curves) => between(curves.flatMap((points) => points.map((point) => point[MEAN])), 0.005)

function curve(points, shown, ends) {
  const drawn = lineOf(points, MEAN, placing([WIDTH, HEIGHT], shown, ends, 0.05))
  return points.length === 1 ? `${drawn}h0` : drawn
}

/** Makes an empty sparkline. */
export function makeSparkline(parent) {
  const svg = drawing(parent, [WIDTH, HEIGHT], 'tessera-sparkline')
  return { svg, path: curveIn(svg, 'var(--descrip-text)', 1.5) }
}

/** Draws a run's points, up to the step that it goes to. */
export function drawSparkline({ svg, path }, points, { step, steps }, colour) {
  path.style.stroke = colour ?? 'var(--descrip-text)'
  path.setAttribute('d', points.length ? curve(points, bounds([points]), Math.max(steps, step)) : '')
  svg.setAttribute('aria-label', points.length ? t(WORDS.curve, { step }) : t(WORDS.noCurve))
}

/** Makes the chart of several runs. `clear` takes all out, `remove(id)` one, `compare` shows two side by side. */
export function makeChart(parent, { clear, remove, compare }) {
  const element = part(parent, 'tessera-runs-chart')
  element.style.display = 'none'
  const head = part(element, 'tessera-chart-head')
  part(head, 'tessera-grow tessera-aside', 'span', { textContent: t(WORDS.chart) })
  const sideBySide = button(head, t(WORDS.sideBySide), t(WORDS.sideBySideTitle), compare)
  button(head, t(WORDS.clear), '', clear)
  const plot = part(element, 'tessera-chart-plot')
  const losses = part(plot, 'tessera-chart-losses')
  const [high, low] = [part(losses), part(losses)]
  const right = part(plot, 'tessera-chart-right')
  const svg = drawing(right, [WIDTH, HEIGHT], 'tessera-chart-curves')
  const steps = part(right, 'tessera-chart-steps')
  const [first, last] = [part(steps), part(steps)]
  const legend = part(element, 'tessera-chart-legend')
  return { element, svg, high, low, first, last, legend, remove, sideBySide }
}

/** Draws the runs that are chosen: `{id, name, colour, points}` each. */
export function drawChart(chart, runs) {
  const { element, svg, high, low, first, last, legend, remove } = chart
  element.style.display = runs.length ? '' : 'none'
  chart.sideBySide.style.display = runs.length === 2 ? '' : 'none'
  const found = bounds(runs.map(({ points }) => points))
  const ends = runs.reduce((most, { points }) => Math.max(most, points.at(-1)?.[0] ?? 0), 1)
  const digits = (value) => (found ? value().toPrecision(3) : '')
  high.textContent = digits(() => found[1])
  low.textContent = digits(() => found[0])
  first.textContent = found ? '1' : ''
  last.textContent = found ? `${ends} ${t(WORDS.steps)}` : ''
  svg.replaceChildren()
  for (const { id, colour, points } of runs) {
    const path = curveIn(svg, colour, 2)
    path.dataset.run = id
    path.setAttribute('d', found ? curve(points, found, ends) : '')
  }
  svg.setAttribute('aria-label', t(WORDS.chartOf, { names: runs.map(({ name }) => name).join(', ') }))
  legend.replaceChildren()
  for (const { id, name, colour, points } of runs) {
    const row = part(legend, 'tessera-chart-run')
    part(row, 'tessera-swatch', 'span').style.background = colour
    part(row, 'tessera-grow tessera-cut', 'span', { textContent: name, title: name })
    const value = points.length ? points.at(-1)[MEAN].toPrecision(3) : t(WORDS.noCurve)
    part(row, 'tessera-numbers', 'span', { textContent: value })
    const out = button(row, '×', '', () => remove(id), 'tessera-plain')
    out.setAttribute('aria-label', `${t(WORDS.clear)}: ${name}`)
  }
}
