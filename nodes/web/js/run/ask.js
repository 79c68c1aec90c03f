// Questions and wishes of the page about runs, for the server.
import { api } from '../../../../scripts/api.js'
import { t } from '../common/words.js'

export const RUNS_CHANGED = 'tessera.runs.changed' // an event of the window: a run was deleted, or came back

/** Reads an answer of the server. Throws an Error with the sentence to show, and the answer's `status` if there was one. */
async function answerOf(path, options) {
  const answer = await api.fetchApi(path, { cache: 'no-store', ...options }).catch(() => undefined)
  const body = await answer?.json().catch(() => ({}))
  if (answer?.ok) return body
  const text = typeof body?.error === 'string' ? body.error : t('The server does not answer.')
  throw Object.assign(new Error(text), { status: answer?.status })
}

export const read = (path) => answerOf(`/tessera/${path}`)

/** Asks for a change, which no page of another server may do. */
export const change = (path, what = {}) =>
  answerOf(`/tessera/${path}`, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(what) })

/** The address of a preview of the run `id`. */
export const previewAddress = ({ id, step, row, changed }, small) =>
  api.apiURL(`/tessera/runs/${id}/previews/${step}/${row}?v=${changed}${small ? '&small=1' : ''}`)
