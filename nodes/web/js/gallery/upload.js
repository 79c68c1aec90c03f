// Files that are dropped on a folder node go into a subfolder of ComfyUI's input, by core's own route, which overwrites
// nothing: a file whose name is taken gets another one.
import { api } from '../../../../scripts/api.js'
import { t } from '../common/words.js'
import { tellNews } from './tiles.js'

const endingOf = (name) => (/\.[^.]+$/.exec(name)?.[0] ?? '').toLowerCase()
const stemOf = (name) => name.slice(0, name.length - endingOf(name).length)
const hasFiles = (event) => [...(event?.dataTransfer?.items ?? [])].some(({ kind }) => kind === 'file')

/**
 * Has a node take dropped files. `gallery` gives what shows them; `place` the subfolder that they go to and whether it is
 * a new one, none where the folder is another node's; `endings` those that are read, and those of captions, masks and
 * archives (`beside`); `captionEnding` that of the node's captions; `shown(subfolder)` shows the folder and returns what to tell of it.
 */
export function acceptDrops(node, { gallery, place, endings, captionEnding, shown }) {
  const say = (text) => tellNews(gallery(), text)
  const { onDragOver, onDragDrop } = node
  node.onDragOver = function (event) {
    return hasFiles(event) || (onDragOver?.call(this, event) ?? false)
  }
  node.onDragDrop = async function (event) {
    const files = [...(event?.dataTransfer?.files ?? [])]
    if (!files.length) return onDragDrop?.call(this, event) ?? false
    await take(files)
    return true
  }

  async function take(files) {
    const { subfolder, isNew } = place() ?? {}
    if (!subfolder) return say(t('The folder comes from another node; drop files there.'))
    const { endings: listed, beside } = endings() ?? {}
    if (!listed) return say(t('The server has not said yet which files it reads; try again.'))
    const chosen = files.filter((file) => listed.includes(endingOf(file.name)))
    const ending = captionEnding()
    const captionOf = (file) => files.find(({ name }) => name === `${stemOf(file.name)}${ending}`)
    const captions = chosen.map(captionOf)
    const isBeside = ({ name }) => [...beside, ending].some((each) => name.toLowerCase().endsWith(each.toLowerCase()))
    const isArchive = ({ name }) => /\.(zip|tar|tgz|tar\.gz)$/i.test(name)
    // Captions alone would lie in a new folder without their pictures.
    const lone = files.filter((file) => !chosen.includes(file) && !captions.includes(file) && isBeside(file))
      .filter((file) => !isNew || chosen.length || isArchive(file))
    const others = files.filter((file) => ![...chosen, ...captions, ...lone].includes(file)).map(({ name }) => name)
    const problems = []
    const tellTaken = (wanted, got) =>
      problems.push(t('{wanted} already exists with other text and is still used; your caption was saved as {got}.', { wanted, got }))
    if (others.length) {
      const named = [...others.slice(0, 5), ...(others.length > 5 ? [t('{count} more', { count: others.length - 5 })] : [])]
      const told = { files: named.join(', '), endings: listed.join(' '), ending }
      problems.push(others.some((name) => isBeside({ name }))
        ? t('Not taken: {files}. Put them beside their pictures, in the folder of this node.', told)
        : t('Not taken: {files}. Drop {endings}, captions ({ending}), masks, zip or tar.', told))
    }
    const copied = [...chosen, ...lone]
    for (const [at, file] of copied.entries()) {
      say(t('Copying {at} of {all}: {file}', { at: at + 1, all: copied.length, file: file.name }))
      try {
        const name = await upload(file, file.name, subfolder)
        if (lone.includes(file) && name !== file.name && file.name.endsWith(ending)) {
          tellTaken(file.name, name)
          continue
        }
        if (name !== file.name) problems.push(t('{file} already exists, so the new file is named {name}.', { file: file.name, name }))
        const caption = chosen.includes(file) && captionOf(file)
        if (!caption) continue
        const wanted = `${stemOf(name)}${ending}`
        const got = await upload(caption, wanted, subfolder)
        if (got !== wanted) tellTaken(wanted, got)
      } catch (error) {
        problems.push(t('{file} was not copied: {reason}', { file: file.name, reason: error.message }))
      }
    }
    const moved = copied.length ? await shown(subfolder) : ''
    say([moved, ...problems].filter(Boolean).join(' '))
  }
}

/** On the canvas renderer the elements of widgets cover the canvas, which would have told the node. */
export function catchDrops(nodes) {
  const isOver = (target) => (node) => node.widgets?.some(({ element }) => element?.contains(target))
  for (const type of ['dragenter', 'dragover', 'drop']) {
    document.addEventListener(type, (event) => {
      if (!hasFiles(event) || /** @type {Element} */ (event.target).closest?.('[data-node-id]')) return // there Nodes 2.0 tells the node
      const node = nodes().find(isOver(event.target))
      if (!node) return
      event.preventDefault()
      event.stopPropagation()
      if (type === 'drop') node.onDragDrop(event)
    }, true)
  }
}

async function upload(file, name, subfolder) {
  const body = new FormData()
  body.append('image', file, name)
  body.append('type', 'input')
  body.append('subfolder', subfolder)
  const answer = await api.fetchApi('/upload/image', { method: 'POST', body })
  if (answer.status === 413) {
    throw new Error(t('it is larger than this server takes (see --max-upload-size); put it into the folder by hand.'))
  }
  if (!answer.ok) throw new Error(t('the server answered {status}.', { status: answer.status }))
  return (await answer.json()).name
}
