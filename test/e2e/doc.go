// Package e2e tests a real jbofd on loopback. It uses the Go host and raw sockets, kills the daemon, and sends it
// invalid input. The tests need neither root nor a VM.
//
//	go test ./test/e2e                  the daemon as it is shipped
//	go test -race ./test/e2e            the daemon under the race detector, too
//	go test ./test/e2e -seed 7          the luck of an earlier run
//	go test ./test/e2e -daemon bin/jbofd   a binary built elsewhere
//
// At the end of every daemon, the tests check that it has released all resources (connections, buffers, goroutines,
// descriptors), that it stops in time, and that its log contains no panics, races or leaks.
package e2e
