module jbofd/test/bench

go 1.26
