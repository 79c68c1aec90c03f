// The report of a run over the page, or that of two runs side by side. It is made of files that anybody may have written,
// so it is shown in a frame without rights, which loads nothing.
import { api } from '../../../../scripts/api.js'
import { button, part } from '../common/elements.js'
import { t } from '../common/words.js'
import { WORDS } from './sentences.js'

/**
 * Opens the report of a run, or of two.
 * @param {string[]} ids
 * @param {{text: string, does: () => void}[]} actions the buttons above it, each with what it does once the report is closed
 */
export function openReport([id, beside], actions = []) {
  const dialog = part(document.body, 'tessera-report-page', 'dialog')
  dialog.setAttribute('aria-label', t(WORDS.report))
  dialog.addEventListener('close', () => dialog.remove())
  dialog.addEventListener('keydown', (event) => event.stopPropagation()) // else ComfyUI's shortcuts hear it
  const head = part(dialog, 'tessera-report-head')
  for (const { text, does } of actions) {
    button(head, text, '', () => {
      dialog.close()
      does()
    })
  }
  part(head, 'tessera-grow', 'span')
  button(head, t(WORDS.close), '', () => dialog.close())
  const frame = part(dialog, '', 'iframe', { title: t(WORDS.report) })
  frame.setAttribute('sandbox', '')
  frame.src = api.apiURL(`/tessera/runs/${id}/report${beside ? `?beside=${beside}` : ''}`)
  dialog.showModal()
}
