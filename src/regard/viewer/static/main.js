// Where the served page begins.

import { startPage } from './app.js';
import { HttpTransport } from './transport.js';

const root = document.getElementById('regard');
startPage(root, new HttpTransport()).then((page) => (root.page = page));
