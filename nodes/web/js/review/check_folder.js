// What Check Folder found, with a button that has Training Images leave the pictures out.
import { button, part } from '../common/elements.js'
import { ourNodes } from '../common/nodes.js'
import { ownWidget, sourceWidget } from '../common/widgets.js'
import { t } from '../common/words.js'

const HEIGHT = 42 // of the button with what it says, in pixels

/** The report, and below it the button where there is anything to leave out. */
export function describeCheck({ report, leave_out: names, folder }) {
  return names ? [report, leaveOut(names.split('\n'), folder)] : [report]
}

function leaveOut(names, folder) {
  const element = document.createElement('div')
  element.dataset.height = `${HEIGHT}`
  const label = t('Leave {count} out in Training Images', { count: names.length })
  button(element, label, names.slice(0, 40).join('\n'), () => (said.textContent = putInto(names, folder)), 'tessera-leave-out')
  const said = part(element, 'tessera-aside')
  said.setAttribute('role', 'status')
  return element
}

/** Adds the names to each Training Images of the folder. Returns what to say. */
function putInto(names, folder) {
  const reading = [...ourNodes()].filter(([node, , hosts]) =>
    node.type === 'TesseraImageFolder' && sourceWidget(node, 'folder', hosts)?.value === folder)
  const widgets = reading.map(([node]) => ownWidget(node, 'leave_out')).filter(Boolean)
  if (!widgets.length) {
    return reading.length
      ? t('leave_out of Training Images is connected already.')
      : t('No Training Images here reads {folder}; add one, or connect leave_out to it.', { folder })
  }
  for (const widget of widgets) {
    const lines = `${widget.value ?? ''}`.split('\n').map((line) => line.trim()).filter(Boolean)
    widget.value = [...new Set([...lines, ...names])].join('\n')
    widget.callback?.(widget.value)
  }
  return t('Training Images leaves them out; take a name out of its leave_out to keep a picture.')
}
