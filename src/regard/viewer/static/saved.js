// Where a saved page begins: with the data in the file itself.

import { startPage } from './app.js';
import { StaticTransport } from './static.js';

const root = document.getElementById('regard');
const data = JSON.parse(document.getElementById('regard-data').textContent);
startPage(root, new StaticTransport(data)).then((page) => (root.page = page));
