// What the sidebar asks of the server.
import { api } from '../../../../scripts/api.js'
import { t } from '../words.js'
import { WORDS } from './sentences.js'

/** Reads an answer of the server. Throws an Error with the sentence to show. */
async function answerOf(path, options) {
  let answer
  try {
    answer = await api.fetchApi(path, { cache: 'no-store', ...options })
  } catch {
    throw new Error(t(WORDS.noAnswer))
  }
  const body = await answer.json().catch(() => ({}))
  if (!answer.ok) throw new Error(typeof body.error === 'string' ? body.error : t(WORDS.noAnswer))
  return body
}

export const read = (path) => answerOf(`/tessera/${path}`)

/** Asks for a change, which no page of another server may do. */
export const change = (path) =>
  answerOf(`/tessera/${path}`, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: '{}' })

export const previewAddress = (id, { step, row, changed }) =>
  api.apiURL(`/tessera/runs/${id}/previews/${step}/${row}?v=${changed}&small=1`)
