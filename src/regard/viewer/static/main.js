// Where the served page begins.

import { startPage } from './app.js';
import { HttpTransport } from './http.js';

const root = document.getElementById('regard');
startPage(root, new HttpTransport()).then((page) => (root.page = page));
