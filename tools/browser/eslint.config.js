// Rules for nodes/web/js. check.py copies this file beside the packages that it imports.
import js from '@eslint/js'
import globals from 'globals'

export default [
  js.configs.recommended,
  {
    languageOptions: { globals: { ...globals.browser, LiteGraph: 'readonly' } },
    linterOptions: { reportUnusedDisableDirectives: 'error' },
    rules: {
      eqeqeq: ['error', 'always', { null: 'ignore' }],
      'no-eval': 'error',
      'no-implied-eval': 'error',
      'no-restricted-properties': [
        'error',
        ...['innerHTML', 'outerHTML', 'insertAdjacentHTML'].map((property) => ({
          property, message: 'What a server says is set as text, never as HTML.',
        })),
      ],
      'no-shadow': 'error',
      'no-var': 'error',
      'prefer-const': 'error',
    },
  },
]
