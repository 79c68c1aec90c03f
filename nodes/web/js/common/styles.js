// The one style sheet of the pack's elements, tessera.css.
import { app } from '../../../../scripts/app.js'

const sheet = document.createElement('link')
Object.assign(sheet, { rel: 'stylesheet', href: new URL('../../tessera.css', import.meta.url).href })
const loaded = new Promise((done) => (sheet.onload = sheet.onerror = done))
document.head.append(sheet)

app.registerExtension({
  name: 'tessera.styles',
  async setup() {
    await loaded // before the first workflow is opened
  },
})
