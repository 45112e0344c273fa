#!/usr/bin/env bash
# Opens a page of `dump_hlo.py --html` in headless Chromium, with no network, and takes a picture:
#
#     tools/screenshot_html.sh page.html picture.png [box]
#
# box: the id of a box, such as s0:fp8moe_gmm.1, which is clicked. The script fails unless Chromium
# has run the page's script. Debian: apt-get install chromium
set -euo pipefail
page=file://$(realpath "$1") picture=$(realpath -m "$2") box=${3:-}
[ -z "$box" ] || page="$page#pick=$box"
chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
options=(--headless --no-sandbox --disable-gpu --hide-scrollbars "--user-data-dir=$profile"
  "--host-resolver-rules=MAP * ~NOTFOUND" --window-size=1800,1500 --virtual-time-budget=3000)
"$chromium" "${options[@]}" --dump-dom "$page" >"$profile/dom.html" 2>/dev/null
boxes=$(grep -o 'data-node="' "$profile/dom.html" | wc -l)
sides=$(grep -o 'data-side="' "$profile/dom.html" | wc -l)
echo "$sides sides, $boxes boxes"
[ "$boxes" -gt 0 ]
if [ -n "$box" ]; then
  grep -q 'class="node [a-z]* picked"' "$profile/dom.html" && echo "$box is picked"
fi
"$chromium" "${options[@]}" "--screenshot=$picture" "$page" 2>/dev/null
