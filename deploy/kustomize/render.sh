#!/bin/bash
# Writes the manifests of the base and of the components that are not written by hand, out of the Helm chart: one source.
#   deploy/kustomize/render.sh [FOLDER]        HELM=helm; FOLDER is where to, by default the folder of this script
# What Helm is for is left out: its labels, and the checksum of the settings, which kustomize puts into a name instead.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$here}

manifest() {  # FILE, then what `helm template` is told
  local file=$folder/$1
  shift
  mkdir -p "$(dirname "$file")"
  {
    echo "# Made by deploy/kustomize/render.sh; the chart in deploy/helm is what to edit."
    "${HELM:-helm}" template polyhead "$here/../helm/polyhead" --namespace polyhead "$@" |
      sed -E '/^ +(app\.kubernetes\.io\/managed-by|helm\.sh\/chart):/d; /^  namespace: polyhead$/d
              /^ +annotations:$/{N; /checksum\/config/d}; /^# Source: /d'
  } >"$file"
}

only() { printf -- '--show-only templates/%s.yaml ' "$@"; }

manifest base/polyhead.yaml $(only serviceaccount service deployment disruption networkpolicy)
manifest components/keda/scaledobject.yaml --set autoscaling.by=keda $(only scaledobject)
manifest components/monitoring/monitoring.yaml --set monitoring.serviceMonitor=true,monitoring.rules=true \
  $(only servicemonitor prometheusrule)
