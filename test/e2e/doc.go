// Package e2e runs the real jbofd on loopback, drives it with the Go host and with raw sockets,
// and kills and maltreats it. Everything in it is a test: no root, no VM.
//
//	go test ./test/e2e                  the daemon as it is shipped
//	go test -race ./test/e2e            the daemon under the race detector, too
//	go test ./test/e2e -seed 7          the luck of an earlier run
//	go test ./test/e2e -daemon bin/jbofd   a binary built elsewhere
//
// Every daemon that a test starts is held, at its end, to having let everything go
// (connections, buffers, goroutines, descriptors), to stopping within its time, and to a log
// without panics, races and leaks.
package e2e
