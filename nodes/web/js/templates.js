// Titles and descriptions of this pack's workflows in ComfyUI's list of templates, from locales/*/main.json. The
// frontend asks its translations for those of its own templates only, and shows files' names for all others.
import { app } from '../../../scripts/app.js'
import { language, translations } from './common/words.js'

export const FOLDER = new URL(import.meta.url).pathname.split('/extensions/')[1]?.split('/')[0] // below custom_nodes
const KEY = 'tessera' // of the translations, whatever the folder is called

app.registerExtension({
  name: 'tessera.templates',
  async setup() {
    const pinia = document.getElementById('vue-app')?.__vue_app__?.config.globalProperties.$pinia
    if (!pinia || !FOLDER) return // another frontend: files' names are shown
    const words = ourWords(await translations())
    const watch = (store) => {
      if (store.$id !== 'workflowTemplates') return
      const name = () => nameAll(store.enhancedTemplates ?? [], words)
      if (store.isLoaded) name()
      store.$onAction(({ name: action, after }) => action === 'loadWorkflowTemplates' && after(name))
    }
    pinia.use(({ store }) => void watch(store))
    const there = pinia._s?.get('workflowTemplates') // made before us
    if (there) watch(there)
  },
})

/** Titles and descriptions of our workflows by the name of their file, in the language of the settings. */
export function ourWords(all) {
  const of = (kind) => ({
    ...all.en?.templateWorkflows?.[kind]?.[KEY],
    ...all[language()]?.templateWorkflows?.[kind]?.[KEY],
  })
  return { titles: of('template'), descriptions: of('templateDescription') }
}

/**
 * Put the titles into what the list shows, in the order of their numbers.
 * @param {any[]} templates
 */
function nameAll(templates, { titles, descriptions }) {
  const ours = templates.filter((each) => decodeURIComponent(FOLDER) === each.sourceModule)
  const places = ours.map((each) => templates.indexOf(each))
  for (const each of ours) {
    each.title = titles[each.name] ?? each.title
    each.description = descriptions[each.name] ?? each.description
    each.searchableText = `${each.title} ${each.description} ${each.name} ${each.sourceModule} extension`
  }
  ours.sort((a, b) => a.title.localeCompare(b.title, undefined, { numeric: true }))
  places.forEach((place, number) => (templates[place] = ours[number]))
}
