// Package cluster tests clusters of real jbofd processes with a real etcd: nodes are killed and paused under load, and
// what clients have seen must be linearizable.
package cluster
