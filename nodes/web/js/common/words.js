// Words of the pages in the language of ComfyUI's settings, from locales/*/main.json. What the server says is English.
import { app } from '../../../../scripts/app.js'
import { api } from '../../../../scripts/api.js'

const asked = api.fetchApi('/i18n').then((answer) => (answer.ok ? answer.json() : {})).catch(() => ({}))
let all = {}

app.registerExtension({
  name: 'tessera.words',
  async setup() {
    all = await asked // before the first workflow is opened
  },
})

/** Translations of all packs, by language. */
export const translations = () => asked

export const language = () => /** @type {string} */ (app.extensionManager.setting.get('Comfy.Locale'))

/** An English text in the language of the settings. Values stand in it in braces, by their names. */
export function t(text, values = {}) {
  const own = all[language()]?.tessera?.[text] ?? text
  return own.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? values[name] : whole))
}
