// Curves of runs in a drawing.

/** The values between which all but a share at either end lie, as a few outliers would press a curve flat. None of none. */
export function between(values, share) {
  const sorted = [...values].sort((a, b) => a - b)
  const at = (part) => sorted[Math.round(part * (sorted.length - 1))]
  return sorted.length ? [at(share), at(1 - share)] : undefined
}

/** The places of a step and a value in a drawing that goes to the step `ends`; `edge`: share kept free above and below. */
export function placing([width, height], [low, high], ends, edge) {
  const x = (step) => (((step - 1) / Math.max(1, ends - 1)) * width).toFixed(1)
  const y = (value) => {
    const share = high > low ? Math.min(1, Math.max(0, (value - low) / (high - low))) : 0.5
    return (height * (1 - edge - (1 - 2 * edge) * share)).toFixed(1)
  }
  return { x, y }
}

/** The line through points, by the value in one of their columns. */
export const lineOf = (points, column, { x, y }) =>
  points.map((point, at) => `${at ? 'L' : 'M'}${x(point[0])} ${y(point[column])}`).join('')
