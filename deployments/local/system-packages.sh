#!/bin/sh
# Programs that the tests start and no Python package brings.
set -eu
missing=""
ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null || missing="$missing postgresql"
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || missing="$missing chromium"
command -v prometheus >/dev/null && command -v promtool >/dev/null || missing="$missing prometheus"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  # the tests start what they need themselves: Debian would start a service of each (man invoke-rc.d: 101)
  policy=/usr/sbin/policy-rc.d
  if [ ! -e $policy ]; then
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod 755 $policy
    trap 'rm -f $policy' EXIT
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
  case "$missing" in *prometheus*) # nor shall one start when the machine does
    ! command -v systemctl >/dev/null || systemctl disable prometheus ;;
  esac
else
  echo "please install:$missing" >&2
  exit 1
fi
