// Fewer things at once: of the widgets that a node's schema calls advanced, those stand behind *more* that have no link
// and the value that they began with. Nodes 2.0 has a button for them of its own and asks `options.advanced`; the canvas
// renderer has none and asks `hidden`. Both are computed when asked, so that nothing has to be kept in step; newer
// frontends keep what they were told, and are told again with each drawing and whatever may change it. No widget is moved
// or taken out: values and prompts are the same with all shown.
import { app } from '../../../scripts/app.js'
import { stateOf } from './common/state.js'
import { after, afterCall } from './common/widgets.js'
import { t } from './common/words.js'

const AWAY = -1e6 // where the slots of hidden widgets lie on the canvas, out of reach of a link that is dragged

app.registerExtension({
  name: 'tessera.more',
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!nodeData.name.startsWith('Tessera')) return
    const inputs = Object.entries({ ...nodeData.input?.required, ...nodeData.input?.optional })
    const advanced = new Set(inputs.filter(([, [, options]]) => options?.advanced).map(([name]) => name))
    if (!advanced.size) return
    const { onNodeCreated, onConfigure } = nodeType.prototype
    nodeType.prototype.onNodeCreated = function (...rest) {
      const result = onNodeCreated?.apply(this, rest)
      stateOf(this).more = hideBehindMore(this, advanced)
      return result
    }
    nodeType.prototype.onConfigure = function (info, ...rest) {
      const result = onConfigure?.call(this, info, ...rest)
      const { more } = stateOf(this)
      more?.tell()
      // Saved before there was *more*: the node gives back the room of what is hidden now.
      if (info.showAdvanced === undefined) more?.shrink()
      return result
    }
  },
})

function hideBehindMore(node, advanced) {
  const behind = (node.widgets ?? []).filter((widget) => advanced.has(widget.name))
  const kept = new Set() // what came into view stays there until *more* is closed the next time
  let all = false

  node.showAdvanced = false // in every workflow that is saved from now on

  /** True for a widget that is in view in any case. */
  function stays(widget, initial) {
    const now = widget.value !== initial || node.getSlotFromWidget(widget)?.link != null
    if (node.showAdvanced) kept.delete(widget)
    else if (now) kept.add(widget)
    return now || kept.has(widget)
  }

  const told = [] // in newer frontends, what tells them again
  const tell = () => told.forEach((each) => each())
  for (const happening of ['onConnectionsChange', 'onDrawBackground']) afterCall(node, happening, tell)

  const forced = () => all || app.extensionManager.setting.get('Comfy.Node.AlwaysShowAdvancedWidgets')
  const extra = new Map() // widget: is it behind *more*, shown or not
  for (const widget of behind) {
    const initial = widget.value
    const isExtra = () => !stays(widget, initial)
    extra.set(widget, isExtra)
    follow(widget, 'advanced', () => isExtra() && !forced(), told)
    after(widget, tell)
    for (const part of [widget, ...(widget.linkedWidgets ?? [])]) { // such as seed's control_after_generate
      const hidden = () => isExtra() && !node.showAdvanced && !forced()
      compute(part.options, 'advanced', isExtra)
      hide(part, hidden, told)
      let y = part.y
      compute(part, 'y', () => (hidden() ? AWAY : y), (value) => (y = value))
    }
  }

  const count = () => behind.filter((widget) => extra.get(widget)()).length
  const button = node.addWidget('button', 'tessera_more', null, () => node.toggleAdvanced(), {
    serialize: false, canvasOnly: true, // out of the prompt, out of Nodes 2.0, and below out of the saved workflow
  })
  button.serialize = false
  compute(button, 'label', () => (node.showAdvanced ? t('show fewer') : t('show {count} more', { count: count() })))
  hide(button, () => !count() || forced(), told)

  /** Changes what is in view; the node becomes higher or lower by just that. */
  function resizeBy(change) {
    const before = node.computeSize()[1]
    change()
    const now = node.computeSize()[1]
    node.setSize([node.size[0], Math.max(now, node.size[1] + now - before)])
    node.setDirtyCanvas(true, true)
  }

  node.toggleAdvanced = () => resizeBy(() => { // the menu of the canvas calls it too
    node.graph?.incrementVersion()
    node.showAdvanced = !node.showAdvanced
    tell()
  })
  tell()
  node.setSize([node.size[0], node.computeSize()[1]])

  return {
    tell,
    shrink() {
      all = true
      tell()
      const full = node.computeSize()[1]
      all = false
      tell()
      const room = full - node.computeSize()[1]
      if (room > 0 && node.size[1] >= full) node.setSize([node.size[0], node.size[1] - room])
    },
  }
}

/** Newer frontends have setters for what older ones read as it is. */
function hasSetter(object, name) {
  let kind = Object.getPrototypeOf(object)
  while (kind && !Object.getOwnPropertyDescriptor(kind, name)?.set) kind = Object.getPrototypeOf(kind)
  return !!kind
}

/** Keeps a field of a widget at what `get` gives. told: gets what does so in newer frontends. */
function follow(widget, name, get, told) {
  if (!hasSetter(widget, name)) return compute(widget, name, get)
  told.push(() => (widget[name] = get()))
}

/** Hides a widget on the canvas while `get` is true; Nodes 2.0, which has a button of its own, asks `advanced`. */
function hide(widget, get, told) {
  if (!hasSetter(widget, 'hidden')) return compute(widget, 'hidden', get)
  // Asked anew by `told`, and by the frontend itself where it changes from one renderer to the other.
  compute(widget.options, 'hidden', () => !LiteGraph.vueNodesMode && get())
  told.push(() => widget.syncLiveVisibilityOptions?.())
}

function compute(object, name, get, set = () => {}) {
  Object.defineProperty(object, name, { get, set, configurable: true, enumerable: true })
}
