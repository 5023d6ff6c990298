{{/* Names are short: KubeRay makes longer ones of them, and a Service's name has 63 letters at most. */}}
{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- $full | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "baton.selectorLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "baton.labels" -}}
{{ include "baton.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "baton.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end -}}

{{- define "baton.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "baton.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{/* "https" where gateways have a certificate: the chart's Secret, or files that config names. */}}
{{- define "baton.scheme" -}}
{{- ternary "https" "http" (not (not (or .Values.tls.existingSecret (dig "gateway" "tls_cert" "" .Values.config)))) -}}
{{- end -}}

{{- define "baton.tokenSecret" -}}
{{ default (printf "%s-ray-token" (include "baton.fullname" .)) .Values.auth.existingSecret }}
{{- end -}}

{{/* How many workers of a role there are, over all groups. */}}
{{- define "baton.workers" -}}
{{- $count := 0 -}}
{{- range .root.Values.groups -}}
{{- if eq .role $.role -}}
{{- $count = add $count (mul (int .replicas) (int (default 1 .workersPerPod))) -}}
{{- end -}}
{{- end -}}
{{- $count -}}
{{- end -}}

{{/* What would come up and not work. */}}
{{- define "baton.check" -}}
{{- range $role := list "gateway" "decode" -}}
{{- if lt (int (include "baton.workers" (dict "root" $ "role" $role))) 1 }}{{ fail (printf "groups: there is no %s" $role) }}{{ end -}}
{{- end -}}
{{- if and (gt (int (include "baton.workers" (dict "root" . "role" "gateway"))) 1) (not .Values.jobs.existingSecret) -}}
{{- fail "jobs.existingSecret: several gateways share one job store, on a server" -}}
{{- end -}}
{{- $open := dig "gateway" "open_to_network" false .Values.config -}}
{{- if and (or .Values.ingress.enabled (ne .Values.service.type "ClusterIP")) (not .Values.apiKeys.existingSecret) (not $open) -}}
{{- fail "apiKeys.existingSecret: whoever reaches the gateways from outside would use them; or config.gateway.open_to_network: true" -}}
{{- end -}}
{{- with .Values.gcsFaultTolerance -}}
{{- if and (or .redisPasswordSecret .redisUsername) (not .redisAddress) }}{{ fail "gcsFaultTolerance.redisAddress: whose password is it?" }}{{ end -}}
{{- end -}}
{{- if and .Values.kvEvents.from (not .Values.kvEvents.enabled) }}{{ fail "kvEvents.from: there are no events; kvEvents.enabled" }}{{ end -}}
{{- range $name, $group := .Values.groups -}}
{{- if and (eq $group.role "gateway") (gt (int (default 1 $group.workersPerPod)) 1) -}}
{{- fail (printf "groups.%s.workersPerPod: gateways of one pod would want one port" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What Baton is told: what follows from the chart's values, and over it .Values.config. */}}
{{- define "baton.config" -}}
{{- $decided := dict
  "cluster" .Values.cluster
  "prefill" (int (include "baton.workers" (dict "root" . "role" "prefill")))
  "decode" (int (include "baton.workers" (dict "root" . "role" "decode")))
  "gateways" (int (include "baton.workers" (dict "root" . "role" "gateway")))
  "bind_host" "node"
  "pin_cores" false
  "placement" (dict "resources" "role" "cpus" .Values.placement.cpus "gpus" .Values.placement.gpus
    "strategy" .Values.placement.strategy "node_labels" .Values.placement.nodeLabels)
  "model" (dict "model" .Values.model.name)
  "gateway" (dict "host" "0.0.0.0" "port" (int .Values.service.port) "open_to_network" (not .Values.apiKeys.existingSecret)
    "api_keys_file" (ternary "/etc/baton/api-keys/keys.yaml" "" (not (not .Values.apiKeys.existingSecret))))
  "liveness" (dict "start_deadline_s" .Values.deployer.startSeconds)
-}}
{{- if .Values.tls.existingSecret -}}
{{- $_ := merge $decided.gateway (dict "tls_cert" "/etc/baton/tls/tls.crt" "tls_key" "/etc/baton/tls/tls.key") -}}
{{- end -}}
{{- if .Values.kvEvents.enabled }}{{ $_ := set $decided "kv_events" (dict "publish" true "host" "0.0.0.0") }}{{ end -}}
{{- mergeOverwrite $decided (deepCopy .Values.config) | toYaml -}}
{{- end -}}

{{/* Restricted, but for memory that RDMA locks. */}}
{{- define "baton.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
  {{- if .rdma }}
  add: [IPC_LOCK]
  {{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* The pod of the head (role "head") or of a group. Takes root, name, role, pod (its values over podDefaults). */}}
{{- define "baton.rayPod" -}}
{{- $root := .root -}}
{{- $pod := .pod -}}
{{- $limits := deepCopy $pod.resources.limits -}}
{{- $requests := deepCopy $pod.resources.requests -}}
{{- $extra := dict -}}
{{- if gt (int $pod.gpu.count) 0 }}{{ $_ := set $extra $pod.gpu.resource (toString $pod.gpu.count) }}{{ end -}}
{{- if $pod.rdma.enabled }}{{ $_ := set $extra $pod.rdma.resource (toString $pod.rdma.count) }}{{ end -}}
{{- if $pod.hugepages.amount }}{{ $_ := set $extra (printf "hugepages-%s" $pod.hugepages.size) $pod.hugepages.amount }}{{ end -}}
metadata:
  labels:
    {{- include "baton.selectorLabels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .role }}
    baton/group: {{ .name }}
    {{- if and $root.Values.kvEvents.enabled (has .role (list "prefill" "decode")) }}
    baton/kv-events: "true"
    {{- end }}
    {{- with $pod.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $pod.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "baton.serviceAccount" $root }}
  automountServiceAccountToken: {{ and (eq .role "head") $root.Values.rayAutoscaler.enabled }}
  terminationGracePeriodSeconds: {{ $pod.terminationGracePeriodSeconds }}
  securityContext:
    {{- toYaml $root.Values.podSecurityContext | nindent 4 }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- range $field := list "runtimeClassName" "priorityClassName" }}
  {{- with index $pod $field }}
  {{ $field }}: {{ . }}
  {{- end }}
  {{- end }}
  {{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
  {{- with index $pod $field }}
  {{ $field }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  containers:
    - name: {{ ternary "ray-head" "ray-worker" (eq .role "head") }}
      image: {{ include "baton.image" $root }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      securityContext:
        {{- include "baton.containerSecurityContext" (dict "rdma" $pod.rdma.enabled) | nindent 8 }}
      resources:
        requests:
          {{- toYaml (merge $requests $extra) | nindent 10 }}
        limits:
          {{- toYaml (merge $limits $extra) | nindent 10 }}
      env:
        {{- include "baton.env" . | nindent 8 }}
        {{- with $pod.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        {{- include "baton.ports" . | nindent 8 }}
      {{- include "baton.probes" . | nindent 6 }}
      {{- if ne .role "head" }}
      # What runs here is finished, or goes on elsewhere, before Ray is told to stop: it would not tell its actors.
      lifecycle:
        preStop:
          exec:
            command: [baton, leave, "--cluster={{ $root.Values.cluster }}", "--within-s={{ sub (int $pod.terminationGracePeriodSeconds) 25 }}"]
      {{- end }}
      volumeMounts:
        - {name: scratch, mountPath: /tmp, subPath: tmp}
        - {name: scratch, mountPath: /var/lib/baton, subPath: home}
        - {name: shm, mountPath: /dev/shm}
        {{- if $pod.hugepages.amount }}
        - {name: hugepages, mountPath: /dev/hugepages}
        {{- end }}
        {{- if $root.Values.model.existingClaim }}
        - {name: models, mountPath: {{ $root.Values.model.mountPath }}, readOnly: true}
        {{- end }}
        {{- if eq .role "gateway" }}
        {{- if $root.Values.tls.existingSecret }}
        - {name: tls, mountPath: /etc/baton/tls, readOnly: true}
        {{- end }}
        {{- if $root.Values.apiKeys.existingSecret }}
        - {name: api-keys, mountPath: /etc/baton/api-keys, readOnly: true}
        {{- end }}
        {{- if $root.Values.jobs.stateClaim }}
        - {name: state, mountPath: /var/lib/baton-state}
        {{- end }}
        {{- end }}
        {{- with $pod.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: scratch
      emptyDir: {sizeLimit: {{ $pod.scratchSize }}}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $pod.shmSize }}}
    {{- if $pod.hugepages.amount }}
    - name: hugepages
      emptyDir: {medium: HugePages-{{ $pod.hugepages.size }}}
    {{- end }}
    {{- if $root.Values.model.existingClaim }}
    - name: models
      persistentVolumeClaim: {claimName: {{ $root.Values.model.existingClaim }}, readOnly: true}
    {{- end }}
    {{- if eq .role "gateway" }}
    {{- if $root.Values.tls.existingSecret }}
    - name: tls
      secret: {secretName: {{ $root.Values.tls.existingSecret }}, defaultMode: 0440}
    {{- end }}
    {{- if $root.Values.apiKeys.existingSecret }}
    - name: api-keys
      secret: {secretName: {{ $root.Values.apiKeys.existingSecret }}, defaultMode: 0440}
    {{- end }}
    {{- if $root.Values.jobs.stateClaim }}
    - name: state
      persistentVolumeClaim: {claimName: {{ $root.Values.jobs.stateClaim }}}
    {{- end }}
    {{- end }}
    {{- with $pod.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "baton.env" -}}
- {name: HOME, value: /var/lib/baton}
- {name: BATON_CACHE_DIR, value: /var/lib/baton/cache}
- {name: BATON_STATE_DIR, value: {{ ternary "/var/lib/baton-state" "/var/lib/baton/state" (and (eq .role "gateway") (ne .root.Values.jobs.stateClaim "")) }}}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_worker_niceness, value: "0"}
{{- if not .root.Values.auth.enabled }}
- {name: RAY_AUTH_MODE, value: disabled}
{{- end }}
{{- if .root.Values.jobs.existingSecret }}
- name: BATON_SET_JOBS__DATABASE
  valueFrom:
    secretKeyRef: {name: {{ .root.Values.jobs.existingSecret }}, key: database}
{{- end }}
{{- end -}}

{{- define "baton.ports" -}}
{{- if eq .role "head" -}}
- {name: gcs-server, containerPort: 6379}
- {name: dashboard, containerPort: 8265}
{{- else if eq .role "gateway" -}}
- {name: http, containerPort: {{ .root.Values.service.port }}}
{{- end }}
- {name: metrics, containerPort: 8080}
- {name: raylet-health, containerPort: 52365}
{{- end -}}

{{/* Alive: the node's raylet answers. Never a gateway's or an engine's health: the controller replaces those processes
by itself, and to kill the pod would end the others. Ready, of a gateway: what is asked now can be finished. */}}
{{- define "baton.probes" -}}
startupProbe:
  httpGet: {path: /api/local_raylet_healthz, port: raylet-health}
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /api/local_raylet_healthz, port: raylet-health}
  periodSeconds: 15
  timeoutSeconds: 10
  failureThreshold: 8
readinessProbe:
  {{- if eq .role "head" }}
  httpGet: {path: /api/gcs_healthz, port: dashboard}
  {{- else if eq .role "gateway" }}
  httpGet: {path: /health, port: http{{ if eq (include "baton.scheme" .root) "https" }}, scheme: HTTPS{{ end }}}
  {{- else }}
  httpGet: {path: /api/local_raylet_healthz, port: raylet-health}
  {{- end }}
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: {{ ternary 2 6 (eq .role "gateway") }}
{{- end -}}
